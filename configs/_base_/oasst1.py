# The English and multilingual chats of OpenAssistant, in the selection of the QLoRA paper.
oasst1 = dict(type="datasets.load_dataset", path="timdettmers/openassistant-guanaco")
